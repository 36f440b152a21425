"""Steps of optimizers whose parameters several ranks share."""
