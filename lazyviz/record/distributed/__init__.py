"""Distributed recording: one rank of N, with process groups that only return shapes, and collectives as
nodes.
"""
