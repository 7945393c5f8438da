"""Round Attention at work: the conversation as a value, and a turn of it.

Read ``conversation.py`` (what a conversation is), then ``turn.py`` and ``closing.py`` (what a question does, in order),
``selection.py`` (which rounds it sees), ``steps.py`` (what a device computes) and ``round_programs.py`` (how it is
compiled).
"""
