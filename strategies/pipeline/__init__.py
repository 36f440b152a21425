"""Pipeline parallelism that runs the user's step on every stage and skips blocks of other stages."""
