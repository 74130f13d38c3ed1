"""What training will see of a data set, before it trains."""
