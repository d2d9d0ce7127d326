"""Compute shards on several devices of this machine or on a Ray cluster, if one process on one device is not enough."""
