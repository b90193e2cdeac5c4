"""Publish many messages with few waits for confirms."""

from .batch import Outcome, PublishBatch

__all__ = ["Outcome", "PublishBatch"]
