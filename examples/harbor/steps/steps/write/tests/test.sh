#!/bin/sh
sh /tests/grade.sh 12
