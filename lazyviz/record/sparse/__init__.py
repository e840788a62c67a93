"""Sparse tensors: pending components of real sparse tensors, and their kernels as operators on components."""
