"""Outrider: agent rollouts as a service for reinforcement learning."""

from outrider.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
