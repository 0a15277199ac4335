#!/bin/bash
# The working directory is the image's, and of the agent's sandbox only the artifact is here.
reward=0
if [ "$EXACT" = yes ] && [ ! -e /app/notes.txt ] && [ "$(cat /app/out/squares.txt)" = "$(cat expected.txt)" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
