#!/bin/sh
cat numbers.txt more.txt 2> /dev/null | awk '{ sum += $1 } END { print sum }' > sum.txt
