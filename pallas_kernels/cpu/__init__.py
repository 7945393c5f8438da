"""Products for CPUs that XLA computes far from what memory allows, written in C++ and called by it."""
