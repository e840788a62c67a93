"""Native modules in Cython and C++; lazyviz gives the same results without them."""
