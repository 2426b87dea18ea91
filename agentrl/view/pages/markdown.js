"use strict";
// Markdown, code and patches, drawn as elements. No text is parsed as HTML, no picture is loaded, and
// a link leads to http(s) only. What is not understood stays as it was written.

const MOST_FORMATTED = 200_000; // characters; a longer text stays as written
const MOST_COLOURED = 50_000;
const MOST_INLINE = 10_000;
const KEYWORDS = new Set("and as async await break case catch class const continue def del do done elif else end enum esac except export extends false False fi finally fn for from func function global if impl import in interface is lambda let match mod mut namespace new nil None not null nullptr or package pass pub raise return self static struct super switch then this throw trait true True try type union use var void where while with yield select insert update delete create table join order group by values".split(" "));

function markdown(text) {
  if (text.length > MOST_FORMATTED) return inert(text);
  const lines = text.split("\n");
  const blocks = [];
  let said = [];
  const paragraph = () => {
    if (said.length) blocks.push(el("p", {}, inline(said.join("\n"))));
    said = [];
  };
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const fence = /^ {0,3}(`{3,20}|~{3,20})[ \t]{0,9}([\w+#.-]{0,30})[^`]*$/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const block = { list: /^\s*([-*+]|\d{1,9}[.)])\s/, quote: /^>/, table: /^\s*\|.*\|\s*$/ };
    const run = (pattern, also = null) => {
      const from = i;
      while (i < lines.length && (pattern.test(lines[i]) || (also && i > from && also.test(lines[i])))) i++;
      return lines.slice(from, i);
    };
    if (fence) {
      paragraph();
      const end = new RegExp("^ {0,3}" + fence[1][0] + "{" + fence[1].length + ",}\\s*$");
      let close = i + 1;
      while (close < lines.length && !end.test(lines[close])) close++;
      blocks.push(code(lines.slice(i + 1, close).join("\n"), fence[2]));
      i = close + 1;
    } else if (heading) {
      paragraph();
      blocks.push(el("p.heading", {}, el("span.faint", {}, heading[1] + " "), inline(heading[2])));
      i++;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      paragraph();
      blocks.push(el("hr"));
      i++;
    } else if (block.list.test(line)) {
      paragraph();
      blocks.push(list(run(block.list, /^\s+\S/)));
    } else if (block.quote.test(line)) {
      paragraph();
      blocks.push(el("blockquote", {}, markdown(run(block.quote).map((each) => each.replace(/^(>\s?)+/, "")).join("\n"))));
    } else if (block.table.test(line) && /^\s*\|[\s:|-]+\|\s*$/.test(lines[i + 1] || "")) {
      paragraph();
      const [head, , ...rows] = run(block.table).map((each) => each.trim().slice(1, -1).split("|"));
      blocks.push(el("div.scroll", {}, el("table", {}, el("thead", {}, el("tr", {}, head.map((cell) => el("th", {}, inline(cell.trim()))))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, inline(cell.trim())))))))));
    } else {
      line.trim() ? said.push(line) : paragraph();
      i++;
    }
  }
  paragraph();
  return blocks;
}

// Items at any depth; an item's own lines are text.
function list(lines) {
  const items = [];
  for (const line of lines) {
    const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(line);
    if (item) items.push({ depth: Math.min(4, Math.floor(item[1].length / 2)), mark: /\d/.test(item[2]) ? item[2] : "•", text: [item[3]] });
    else items.at(-1).text.push(line.trim());
  }
  return el("ul.list", {}, items.map((item) => el("li.depth" + item.depth, {}, el("span.faint", {}, item.mark + " "), el("span", {}, inline(item.text.join("\n"))))));
}

const INLINE = /(`{1,3})([^`\n]{1,500})\1|\*\*(\S[^\n*]{0,500}?)\*\*|(?<![\w*])\*(\S[^\n*]{0,300}?)(?<=\S)\*(?![\w*])|!?\[([^\]\n]{0,300})\]\(([^()\s]{1,1000})\)|(https?:\/\/[^\s<>"'`()]{1,1000})/g;

function inline(text) {
  if (text.length > MOST_INLINE) return inert(text);
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(inert(text.slice(end, found.index)));
    const [whole, , snippet, strong, slanted, label, target, bare] = found;
    if (snippet !== undefined) nodes.push(el("code", {}, snippet));
    else if (strong !== undefined) nodes.push(el("b", {}, strong));
    else if (slanted !== undefined) nodes.push(el("em", {}, slanted));
    else nodes.push(link(whole, label, target || bare));
    end = found.index + whole.length;
  }
  nodes.push(inert(text.slice(end)));
  return nodes;
}

function link(whole, label, target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return inert(whole);
  }
  if (!["http:", "https:"].includes(url.protocol)) return inert(whole);
  return el("a.outside", { href: url.href, title: "leads away, to " + url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, label || target);
}

// Code and patches ----------------------------------------------------------------------------

function code(text, language = "") {
  if (language === "diff" || language === "patch" || isPatch(text)) return patch(text);
  return el("pre.code", { title: language || null }, text.length > MOST_COLOURED ? inert(text) : coloured(text, language.toLowerCase()));
}

function isPatch(text) {
  return /^(diff --git |--- \S)/m.test(text.slice(0, 2000)) && /^@@ /m.test(text.slice(0, 20_000));
}

function patch(text) {
  const kind = (line) => (/^(\+\+\+|---|diff |index )/.test(line) ? "file" : line.startsWith("@@") ? "hunk" : line[0] === "+" ? "added" : line[0] === "-" ? "removed" : "same");
  return el("pre.code.patch", {}, text.split("\n").map((line) => el("span." + kind(line), {}, line + "\n")));
}

function coloured(text, language) {
  const slashes = /^(js|ts|jsx|tsx|javascript|typescript|c|cc|cpp|h|hpp|java|rust|rs|go|kotlin|swift|php|scala|css)$/.test(language);
  const comment = slashes ? "\\/\\/.*|\\/\\*[\\s\\S]{0,5000}?\\*\\/" : language === "sql" ? "--.*" : language === "json" ? "(?!)" : "(?:^|(?<=\\s))#.*";
  const parts = new RegExp(`(${comment})|("""[\\s\\S]{0,5000}?"""|"(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*')|(\\b\\d[\\w.]*\\b)|([A-Za-z_]\\w*)`, "gm");
  const nodes = [];
  let end = 0;
  const plain_ = (to) => to > end && nodes.push(inert(text.slice(end, to)));
  for (const found of text.matchAll(parts)) {
    const kind = found[1] !== undefined ? "comment" : found[2] !== undefined ? "string" : found[3] !== undefined ? "figure" : KEYWORDS.has(found[4]) ? "keyword" : null;
    if (!kind) continue;
    plain_(found.index);
    nodes.push(el("span.tok-" + kind, {}, found[0]));
    end = found.index + found[0].length;
  }
  plain_(text.length);
  return nodes;
}
