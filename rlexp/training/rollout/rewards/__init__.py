"""Rewards: rules, the user's functions and reward models, alone or as a weighted sum.

This file stays empty: the processes that run a user's function import it, and must not import torch.
"""
