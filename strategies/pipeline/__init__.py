"""Pipeline parallelism that runs the user's own step on every stage and skips the blocks of the other stages."""
