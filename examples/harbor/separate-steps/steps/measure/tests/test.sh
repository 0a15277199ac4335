#!/bin/bash
# This sandbox has only the artifact.
reward=0
if [ "$(pwd)" = /grading ] && [ ! -e /app/notes.txt ] && [ "$(cat /app/out/length.txt)" = 8 ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
