"""Round Attention at work: the conversation as a value, and a turn of it.

Read ``value.py`` (what a conversation is), then ``turn.py`` (what a question does, in order), ``choose.py`` (which
rounds it sees) and ``programs.py`` (what is compiled).
"""
