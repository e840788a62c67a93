"""Native modules in Cython and C++, compiled on installation; lazyviz works the same without them."""
