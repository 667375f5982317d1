"""What ObsSpec would save on the logs of agents that ran without it."""
