#!/bin/bash
# This sandbox has only the artifacts: /app/out without the excluded files, and a file collected after the agent's end.
reward=0
if [ "$(cat /app/out/squares.txt 2> /dev/null | tr '\n' ' ')" = "1 4 9 16 25 " ]; then
    if [ ! -e /app/notes ] && [ ! -e /app/out/scratch.tmp ] && grep -qx notes /logs/artifacts/listing.txt; then
        reward=1
    fi
fi
echo "$reward" > /logs/verifier/reward.txt
