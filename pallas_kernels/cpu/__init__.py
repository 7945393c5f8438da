"""What XLA computes on CPUs far from the speed of their memory, in C++ that it calls."""
