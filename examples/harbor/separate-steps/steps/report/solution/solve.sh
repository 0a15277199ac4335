#!/bin/bash
echo "$(cat /app/out/length.txt) $(cat /app/notes.txt)" > /app/report.txt
[ -e /tests ] && echo "the first step's tests are here" > /app/report.txt
exit 0
