"""The hardware of a plan: hosts, devices, links, and the seconds of messages between them."""

from .cluster import Cluster
from .hosts import Device, Host, Lane, Link, Place, Route

__all__ = ["Cluster", "Device", "Host", "Lane", "Link", "Place", "Route"]
