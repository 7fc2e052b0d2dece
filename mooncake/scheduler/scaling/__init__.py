"""How many replicas of each role the load needs."""
