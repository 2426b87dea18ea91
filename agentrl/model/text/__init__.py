"""The ways in which families of models write a turn: reasoning, text and tool calls
(docs/dialects.md)."""
