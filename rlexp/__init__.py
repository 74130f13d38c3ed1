"""rlexp: preference training and reinforcement learning over ring attention.

The promise: the ring size is a free parameter. See docs/architecture.md.
"""

__version__ = "0.1.0"
