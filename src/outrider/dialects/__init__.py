"""The wire formats in which agents call models. A dialect is the code for one format. Each dialect has a folder;
several dialects share the modules here.

A dialect's folder defines its `Dialect` and routes (`__init__.py`), the parser of requests (`request.py`), and the
writers of whole and streamed replies (`reply.py`). Each other file of the folder handles one part of requests or
replies, such as the tools.
"""

from __future__ import annotations

from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.responses import RESPONSES_DIALECT

DIALECTS = (MESSAGES_DIALECT, RESPONSES_DIALECT, GEMINI_DIALECT, CHAT_DIALECT)
"""All dialects, in the order in which their routes are tried: the first with a matching route serves a call. The order
matters only for `GET /v1/models` and `GET /v1/models/NAME`, for which three dialects have routes. Messages serves such
a call only if it has Anthropic's header, and Gemini only if it has Google's header. Chat serves all other such
calls."""

UNKNOWN_ROUTES = CHAT_DIALECT
"""The dialect of the error reply to a call that matches no route. Most clients can read OpenAI's errors."""
