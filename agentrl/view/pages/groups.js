"use strict";
// The groups of a run: the trajectories of one task side by side, sorted and filtered.

const SORTS = { advantage: "largest advantage first", newest: "newest first", oldest: "oldest first", worst: "worst reward", best: "best reward", longest: "longest", surprising: "most surprising token", malformed: "most malformed calls" };
const SHOWS = { all: "all", failed: "failed", malformed: "malformed calls", tool_errors: "tool errors", truncated: "cut short", zero_variance: "zero variance", mixed: "different rewards", dropped: "dropped by a filter" };
const GROUPS_ON_PAGE = 20;

async function groupsPage(page, id, parameters) {
  const query = Object.fromEntries(parameters);
  const offset = Number(query.offset || 0);
  const [run, found] = await Promise.all([ask("runs/" + id), ask(`runs/${id}/groups`, query)]);
  const choice = (changes) => change(`run/${id}/groups`, { offset: "", searched: "", ...changes });
  const field = (name, label, control) => el("label.field", {}, el("span", {}, label), control);
  const choose = (name, label, options, usual) =>
    field(name, label, el("select", { name, onchange: (event) => choice({ [name]: event.target.value === usual ? "" : event.target.value }) }, Object.entries(options).map(([value, text]) => el("option", { value, selected: value === (query[name] || usual) }, text))));
  const write = (name, label, type = "search") =>
    field(name, label, el("input", { name, type, value: query[name] || "", onchange: (event) => choice({ [name]: event.target.value.trim() }) }));
  const errors = Object.fromEntries([["", "any"], ...found.errors.map((code) => [code, code])]);
  page.append(
    runHeader(run, "/groups"),
    stored
      ? el("nav.stored", {}, el("span.faint", {}, "kept in this report: "), stored.groups.map(([text, link]) => el("a", { href: address(`run/${id}/groups`, link) }, text)))
      : el("form.filters", { onsubmit: (event) => event.preventDefault() }, write("step", "step", "number"), choose("sort", "sort", SORTS, "advantage"), choose("show", "show", SHOWS, "all"), found.errors.length ? choose("error", "error", errors, "") : null, write("task", "task"), write("text", "text")),
  );
  const count = el("p.faint.count", {}, `${plural(found.num_found, "group")} of ${number(found.num_groups)}`);
  const groups = el("div", {}, found.groups.map((group) => groupCard(id, group)));
  const end = el("div");
  const taught = query.step ? await taughtCard(id, Number(query.step)) : null;
  page.append(...[taught, count, groups, end].filter(Boolean));
  if (!stored && found.num_found) count.after(exportLine(id, query));
  if (!found.groups.length && !query.text) end.append(el("p.faint", {}, run.num_trajectories ? "No group is like this." : "No trajectory yet."));
  if (query.text) searchOn(id, query, found, count, groups, end);
  else if (!stored && found.num_found > GROUPS_ON_PAGE) {
    const to = (place) => address(`run/${id}/groups`, { ...query, offset: place || "" });
    page.append(
      el("nav.pager", {}, offset > 0 && el("a.button", { href: to(Math.max(0, offset - GROUPS_ON_PAGE)) }, "previous"), el("span.faint", {}, `${number(offset + 1)} to ${number(Math.min(offset + GROUPS_ON_PAGE, found.num_found))}`), offset + GROUPS_ON_PAGE < found.num_found && el("a.button", { href: to(offset + GROUPS_ON_PAGE) }, "next")),
    );
  }
  return offset || query.text ? 0 : 2000;
}

// What is ticked, or else what the filters found, as JSON lines. What is ticked stands in the address.
function exportLine(id, query) {
  const { offset, searched, sort, pick, ...asked } = query;
  const picked = (pick || "").split(",").filter(Boolean);
  const file = "api/" + `runs/${id}/export?` + new URLSearchParams(picked.length ? { pick } : asked);
  return el(
    "p.export",
    {},
    el("a.button.small", { href: file, download: "trajectories.jsonl" }, picked.length ? `download ${plural(picked.length, "chosen trajectory", "chosen trajectories")}` : "download what is found"),
    picked.length ? el("a", { href: hereWith(`run/${id}/groups`, { pick: "" }) }, "choose none") : el("span.faint", {}, "as JSON lines; tick trajectories to choose some"),
  );
}

function pickBox(id, member) {
  const mine = `${member.step}.${member.offset}`;
  const picked = () => new Set((here().parameters.pick || "").split(",").filter(Boolean));
  const toggle = () => {
    const chosen = picked();
    chosen.delete(mine) || chosen.add(mine);
    history.replaceState(null, "", hereWith(`run/${id}/groups`, { pick: [...chosen].join(",") }));
    const line = document.querySelector("p.export");
    if (line) line.replaceWith(exportLine(id, here().parameters));
  };
  return el("label.hit", {}, el("input", { type: "checkbox", checked: picked().has(mine), "aria-label": "choose " + member.trajectory_id, onchange: toggle }));
}

// One answer reads trajectories for a moment only; the search goes on until the page is full, or left.
async function searchOn(id, query, found, count, groups, end) {
  const mine = drawn;
  let [shown, { searched, num_found: most }] = [found.groups.length, found];
  const say = () => count.replaceChildren(...inert(`${plural(shown, "group")} with this text (${number(searched)} of ${number(most)} groups searched)`));
  say();
  while (searched < most && shown < GROUPS_ON_PAGE) {
    let got;
    try {
      got = await ask(`runs/${id}/groups`, { ...query, searched });
    } catch (error) {
      end.append(el("p.failure", {}, error.message));
      return;
    }
    if (mine !== drawn) return;
    [shown, searched, most] = [shown + got.groups.length, got.searched, got.num_found];
    groups.append(...got.groups.map((group) => groupCard(id, group)));
    say();
  }
  if (searched < most) end.append(el("a.button", { href: address(`run/${id}/groups`, { ...query, searched }) }, "search on"));
  else if (!shown) end.append(el("p.faint", {}, "No group is like this."));
}

function groupCard(id, group) {
  const components = [...new Set(group.members.flatMap((member) => Object.keys(member.reward_components)))].sort();
  const shown = components.length > 1 ? components : [];
  const hasAdvantages = group.members.some((member) => member.advantage !== null);
  const head = [...(stored ? [] : [""]), "reward", ...shown, ...(hasAdvantages ? ["advantage"] : []), "tokens", "turns", "lowest log-prob", "ended", "said last"];
  const narrow = new Set(["", "reward", "advantage", "ended", "said last"]);
  const most = Math.max(1e-9, ...group.members.map((member) => Math.abs(member.advantage ?? 0)));
  return el(
    "section.card.group",
    {},
    el("div.row", {}, el("a.which", { href: address(`run/${id}/groups`, { step: group.step }) }, "step " + group.step), el("b.task", {}, group.task_id), el("span.faint", {}, `group ${group.group_id}, mean reward ${number(group.mean)}`), group.zero_variance && el("span.tag.warn", {}, "zero variance: no gradient")),
    el(
      "div.scroll",
      {},
      el(
        "table.members",
        {},
        el("thead", {}, el("tr", {}, head.map((name) => el("th" + (narrow.has(name) ? "" : ".wide"), {}, name)))),
        el(
          "tbody",
          {},
          group.members.map((member) =>
            el(
              "tr.whole-link" + (member.matches ? "" : ".dim"),
              { onclick: opens(address(`run/${id}/t/${member.step}/${member.offset}`)) },
              !stored && el("td.pick", {}, pickBox(id, member)),
              el("td.num", {}, el("a.open", { href: address(`run/${id}/t/${member.step}/${member.offset}`), "aria-label": `open ${member.trajectory_id}, reward ${number(member.reward)}` }, el("span." + tone(member.reward), {}, number(member.reward)))),
              shown.map((name) => el("td.num.wide", {}, number(member.reward_components[name]))),
              hasAdvantages && el("td.num", {}, advantageBar(member.advantage, most), signed(member.advantage)),
              el("td.num.wide", {}, number(member.tokens)),
              el("td.num.wide", {}, member.turns),
              el("td.num.wide", {}, number(member.lowest_logprob)),
              el("td", {}, tags(member)),
              el("td.said", {}, el("a", { href: address(`run/${id}/t/${member.step}/${member.offset}`), tabindex: -1 }, member.preview || "–")),
            ),
          ),
        ),
      ),
    ),
  );
}

function advantageBar(value, most) {
  const bar = svg("svg", { class: "bar", width: 40, height: 10, "aria-hidden": "true" });
  if (value) {
    const width = (19 * Math.abs(value)) / most;
    bar.append(svg("rect", { class: value > 0 ? "plus" : "minus", x: value > 0 ? 20 : 20 - width, y: 1, width, height: 8 }));
  }
  bar.append(svg("line", { class: "grid", x1: 20, x2: 20, y1: 0, y2: 10 }));
  return bar;
}

function tone(value) {
  return value > 0 ? "positive" : value < 0 ? "negative" : "zero";
}

function tags(member) {
  return [
    el("span.reason", {}, member.stop_reason.replaceAll("_", " ")),
    member.error && el("span.tag.bad", {}, member.error),
    member.truncated && el("span.tag.warn", {}, "cut"),
    member.malformed > 0 && el("span.tag.warn", {}, plural(member.malformed, "malformed call")),
    member.tool_errors > 0 && el("span.tag.warn", {}, plural(member.tool_errors, "tool error")),
  ];
}
