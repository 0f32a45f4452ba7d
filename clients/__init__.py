"""The robot's side of the wire: policy clients, and a replay of recorded episodes (`python -m clients.replay`)."""

from clients.async_policy_client import AsyncPolicyClient
from clients.errors import ConnectFailed, PolicyError, ReplyLost, ReplyTimeout
from clients.policy_client import PolicyClient

__all__ = ["AsyncPolicyClient", "ConnectFailed", "PolicyClient", "PolicyError", "ReplyLost", "ReplyTimeout"]
