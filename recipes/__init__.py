"""Recipes: modules and data modules that train to a sensible result, each with a yaml of the same name."""
