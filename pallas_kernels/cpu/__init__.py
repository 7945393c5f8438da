"""C++ that XLA calls on CPUs for what it computes far from the speed of their memory."""
