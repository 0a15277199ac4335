#!/bin/bash
mkdir -p /app/out
word=outrider
echo "${#word}" > /app/out/length.txt
echo "with the shell" > /app/notes.txt
sleep 600 > /dev/null 2>&1 &
echo "$!" > /app/running
