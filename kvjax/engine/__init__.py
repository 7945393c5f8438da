"""In-flight batching: requests come and go, and every slot of one compiled batch stays busy."""
