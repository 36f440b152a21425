"""Replicas that train by themselves for many steps and are brought together now and then: local SGD and DiLoCo."""
