"""`python openai_agent.py BASE_URL KEY PAUSE`: an agent with the OpenAI SDK, in a process tree of its own and without
any of Outrider's code. It pauses before each question, and prints its last reply."""

import sys
import time
from typing import Any

import httpx
import openai

QUESTIONS = ("Where is it?", "Read it.", "What does it say?", "Thank you.")


def main() -> None:
    base_url, key, pause = sys.argv[1:]
    http = openai.DefaultHttpxClient(verify=False)
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0, http_client=http)
    messages: list[Any] = []
    for question in QUESTIONS:
        time.sleep(float(pause))
        messages.append({"role": "user", "content": question})
        while True:
            try:
                reply = client.chat.completions.create(model="any", messages=messages)
                break
            except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
                time.sleep(0.2)  # the service is gone, or does not run the session yet
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    print(messages[-1]["content"])


main()
