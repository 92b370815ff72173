#!/bin/sh
# Has the lab cut a link: cut.sh FOLDER LINK SECONDS. Returns once it is cut.
ask="$1/$(hostname)-$$-$(date +%s%N)"
echo "$2 $3" > "$ask.new"
mv "$ask.new" "$ask.ask"
while [ ! -e "$ask.done" ]; do sleep 0.02; done
rm "$ask.done"
