"""Rollouts: engines that draw responses, and the turn-taking that makes episodes and groups of them."""
