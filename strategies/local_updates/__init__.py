"""Local SGD and DiLoCo: replicas with local optimizer steps that synchronize every H steps."""
