"""Tools that Anthropic's clients run and declare by a type alone: what its models know of them, as functions.

Pure data. A type is a family and a date (`bash_20250124`); the dates of a family differ in what is not told here.

Source: Anthropic documentation, "Bash tool" and "Text editor tool", the parameters that a client must handle.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}

CLIENT_TOOLS: dict[str, dict[str, Any]] = {
    "bash": {
        "description": "Run a command in a bash shell that keeps its state between calls.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "description": "The command to run. Required unless the shell is restarted."},
                "restart": {"type": "boolean", "description": "Whether to restart the shell."},
            },
        },
    },
    "text_editor": {
        "description": "View, create and edit text files.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "enum": ["view", "create", "str_replace", "insert"]},
                "path": {**_TEXT, "description": "Path of the file or, to view it, the folder."},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "For view: the first and the last line, counted from 1; -1 is the end of the file.",
                },
                "file_text": {**_TEXT, "description": "For create: the content of the file."},
                "old_str": {**_TEXT, "description": "For str_replace: the text to replace, which must occur once."},
                "new_str": {**_TEXT, "description": "For str_replace: the text to put there."},
                "insert_line": {"type": "integer", "description": "For insert: the line after which, 0 for the start."},
                "insert_text": {**_TEXT, "description": "For insert: the text."},
            },
            "required": ["command", "path"],
        },
    },
}
"""By the type without its date: description and parameters."""
