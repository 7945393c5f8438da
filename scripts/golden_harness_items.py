"""Items of three small tasks for lm-evaluation-harness, a kind of request each, written for this."""

from __future__ import annotations

#: question, choices; the first choice is right.
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What do bees make?", ("honey", "bread", "paper", "salt")),
    ("Which animal barks?", ("a dog", "a cat", "a cow")),
    ("What is the capital of France?", ("Paris", "London", "Rome", "Madrid")),
    ("How many legs does a spider have?", ("eight", "six", "four", "ten")),
    ("What colour is the sky on a clear day?", ("blue", "green", "red")),
    ("What do plants take from the air to grow?", ("carbon dioxide", "helium", "iron", "sugar")),
    ("Which planet do we live on?", ("Earth", "Mars", "Venus", "Jupiter")),
    ("What is frozen water called?", ("ice", "steam", "sand", "smoke")),
    ("Which month comes after March?", ("April", "May", "February", "June")),
    ("What is 7 plus 5?", ("12", "11", "13", "75")),
    ("Which of these is a fruit?", ("an apple", "a hammer", "a stone")),
    ("Who wrote the play Hamlet?", ("William Shakespeare", "Isaac Newton", "Jane Austen", "Homer")),
    ("What does a thermometer measure?", ("temperature", "weight", "distance", "time")),
    ("Which ocean lies between Africa and America?", ("the Atlantic Ocean", "the Indian Ocean", "the Arctic Ocean")),
    ("What is the opposite of hot?", ("cold", "warm", "dry", "loud")),
    ("How many days are there in a week?", ("seven", "five", "ten", "twelve")),
    ("What do you use to cut paper?", ("scissors", "a spoon", "a pillow", "glue")),
    ("Which gas do people need to breathe?", ("oxygen", "neon", "chlorine")),
    ("What language is spoken in Brazil?", ("Portuguese", "Spanish", "French", "Dutch")),
    ("Which metal is attracted by a magnet?", ("iron", "gold", "copper", "silver")),
    ("Where do fish live?", ("in water", "in trees", "under a roof", "in the clouds")),
    ("What is the largest animal on Earth?", ("the blue whale", "the elephant", "the horse", "the ant")),
    ("Which season is the coldest?", ("winter", "summer", "spring", "autumn")),
    ("What do we call a person who flies a plane?", ("a pilot", "a baker", "a nurse", "a farmer")),
)

#: Stands before every question, so that a short answer is likely.
EXAMPLES = "Q: What is the capital of Spain?\nA: Madrid\nQ: What do cows drink?\nA: water\n"

_LIGHTHOUSE = (
    "The keeper of the light walked down to the sea every morning and counted the boats. On most days there were nine. "
    "On the day of the storm there were only seven, and he wrote the number down without saying a word to anybody. "
)
#: Texts whose every token is scored; one is longer than a window.
TEXTS: tuple[str, ...] = (
    "The cat sat on the mat and looked out of the window.",
    "Water boils at one hundred degrees Celsius at sea level; on high mountains it boils sooner.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(2, 3))\n",
    "Dear Anna,\n\nThank you for the book. I read it on the train and forgot to get off.\n\nYours,\nTom",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    "Ünïcödé façade naïve coöperate Straße. Привет, мир! 今日は世界。",
    "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat.",
    "| name | age |\n| --- | --- |\n| Ada | 36 |\n| Alan | 41 |\n",
    "To be, or not to be, that is the question.",
    "Colourless green ideas sleep furiously.",
    "SELECT name, count(*) FROM boats GROUP BY name HAVING count(*) > 3 ORDER BY name;",
    "The train from the north arrives at 14:05 on platform 3 and leaves again four minutes later.",
    "Mix the flour with the sugar. Add two eggs and the butter. Bake for forty minutes and let it cool.",
    "In 1969 two people walked on the Moon while a third flew around it and waited.",
    "A",
    "  indented, with a blank at its end ",
    "The mitochondrion is the powerhouse of the cell. The nucleus holds the genetic material.",
    '{"id": 17, "tags": ["red", "round"], "price": 2.5, "sold": null}',
    "Never has so much been said by so few about so little to so many for so long.",
    "<p>An <em>emphasised</em> word, and &amp; an entity.</p>",
    _LIGHTHOUSE * 9,
)

#: Beginnings that are continued up to a stop string, and answers that are looked for.
BEGINNINGS: tuple[tuple[str, str], ...] = tuple(
    (f"{EXAMPLES}Q: {question}\nA:", choices[0]) for question, choices in QUESTIONS[::2]
) + (
    ("The capital of France is", "Paris"),
    ("cat -> cats\ndog -> dogs\nbird -> birds\ntree ->", "trees"),
    ("one two three four five six seven", "eight"),
    ("Monday, Tuesday, Wednesday, Thursday,", "Friday"),
    ("a: 1\nb: 2\nc: 3\nd: 4\ne:", "5"),
    ("The opposite of black is", "white"),
    ("def square(x):\n    return", "x * x"),
    (_LIGHTHOUSE * 3 + "How many boats were there on most days? There were", "nine"),
)
