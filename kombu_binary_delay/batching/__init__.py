"""Many publishes with few waits."""

from .batch import Outcome, PublishBatch

__all__ = ["Outcome", "PublishBatch"]
