#!/bin/bash
mkdir -p /app/out /app/notes
touch /app/notes/mine /app/out/scratch.tmp
for number in 1 2 3 4 5; do
    echo $((number * number))
done > /app/out/squares.txt
