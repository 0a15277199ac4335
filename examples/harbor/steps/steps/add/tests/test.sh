#!/bin/sh
sh /tests/grade.sh 42
