#!/bin/bash
# The working directory is that of the image. This sandbox has no file of the agent's sandbox but the artifact.
reward=0
if [ "$EXACT" = yes ] && [ ! -e /app/notes.txt ] && [ "$(cat /app/out/squares.txt)" = "$(cat expected.txt)" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
