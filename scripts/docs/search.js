// Searches the index that search-index.js has brought along: an array of {t: title, u: address, k: kind, x: text}.
(function () {
  "use strict";
  const box = document.getElementById("search");
  const list = document.getElementById("found");
  const root = document.documentElement.dataset.root;
  let chosen = -1;

  function score(entry, words) {
    const title = entry.t.toLowerCase().split("::").pop();
    const text = entry.x.toLowerCase();
    let sum = 0;
    for (const word of words) {
      if (title === word) sum += 100;
      else if (title.startsWith(word)) sum += 40;
      else if (title.includes(word)) sum += 20;
      else if (text.includes(word)) sum += 1 + 4 / (1 + text.indexOf(word) / 100);
      else return 0;
    }
    return sum + (entry.k === "page" ? 3 : 0) - title.length / 100;
  }

  function search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    return searchIndex
      .map((entry) => ({ entry, score: score(entry, words), word: words[0] }))
      .filter((hit) => hit.score > 0)
      .sort((a, b) => b.score - a.score)
      .slice(0, 20);
  }

  function excerpt(hit) {
    const at = Math.max(0, hit.entry.x.toLowerCase().indexOf(hit.word) - 30);
    return (at ? "… " : "") + hit.entry.x.slice(at, at + 110);
  }

  function show() {
    list.textContent = "";
    chosen = -1;
    for (const hit of search(box.value)) {
      const link = document.createElement("a");
      link.href = root + hit.entry.u;
      for (const [name, text] of [["b", hit.entry.t], ["i", hit.entry.k], ["span", excerpt(hit)]]) {
        const part = document.createElement(name);
        part.textContent = text;
        link.append(part, " ");
      }
      list.append(link);
    }
    if (box.value.trim() && !list.children.length) list.textContent = "Nothing found.";
    list.hidden = !box.value.trim();
  }

  if (typeof module !== "undefined") module.exports = search;  // for a test without a browser
  if (!box) return;
  box.addEventListener("input", show);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== box) {
      event.preventDefault();
      box.focus();
    } else if (document.activeElement === box && event.key === "Escape") {
      box.value = "";
      show();
    } else if (document.activeElement === box && ["ArrowDown", "ArrowUp", "Enter"].includes(event.key)) {
      const links = list.querySelectorAll("a");
      if (!links.length) return;
      event.preventDefault();
      if (event.key === "Enter") return links[Math.max(chosen, 0)].click();
      chosen = (chosen + (event.key === "ArrowDown" ? 1 : links.length - 1)) % links.length;
      links.forEach((link, i) => link.classList.toggle("chosen", i === chosen));
    }
  });
})();
