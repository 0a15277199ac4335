#!/bin/bash
while read -r word; do
    echo "${word^^}"
done < words.txt >> log.txt
