"""Sizes of the turn under Round Attention that ``tools.aot.mesh`` compiles and its page names."""

#: Rows of the batch, tokens of a conversation so far, of the rounds a question selects, of a round and of a question.
BATCH, SEEN, SELECTED, ROUND, QUESTION = 16, 32768, 4096, 512, 512
