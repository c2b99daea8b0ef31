// The answer viewer. Everything shown is set as text, never as HTML: answers are written by models.
"use strict";
const FOLDER = document.currentScript.dataset.folder;
const PAGE_SIZE = 100;
const SHOWN_FIRST = 4;
const KEPT_CHUNKS = 40;
const WORDS = { R: "right", W: "wrong", N: "no answer", J: "not judged", "-": "no verdict" };
const SHOW = {
  all: "all problems",
  flipped: "flipped: right for one, not for the other",
  fixed: "fixed: not right for A, right for B",
  broken: "broken: right for A, not for B",
  disagreed: "disagreed: some answers right, some not",
  worded: "depends on the template: mostly right in one, not in another",
  cut: "truncated: an answer was cut off",
  unparsed: "no answer found in an answer",
  unjudged: "an answer that could not be judged",
  none: "never right",
  every: "always right",
};
const COMPARED = "The line above each text quotes the answer that the judge read, and says whether it matches the problem's " +
  "reference: by text rules (spelling, numbers, units, options, words) or by algebra (values). Of a program it says how many tests passed.";

let data = null;
const ALL_TEMPLATES = -1;
const state = { benchmark: -1, template: 0, decoding: "", show: "all", a: 0, b: 1, search: "", page: 0, problem: -1 };
const chunks = new Map(); // number -> promise of its content; the oldest are forgotten
const waiting = new Map();

function klearIndex(index) { data = index; start(); }
function klearChunk(number, content) { waiting.get(number)?.(content); waiting.delete(number); }
window.klearIndex = klearIndex;
window.klearChunk = klearChunk;

function load(file, onError) {
  const script = document.createElement("script");
  script.src = `${FOLDER}/${file}`;
  script.onload = () => script.remove();
  script.onerror = onError;
  document.head.append(script);
}

function chunk(number) {
  if (!chunks.has(number)) {
    chunks.set(number, new Promise((resolve, reject) => {
      waiting.set(number, resolve);
      load(`${String(number).padStart(6, "0")}.js`, () => reject(new Error(`chunk ${number} is missing`)));
    }));
    if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
  }
  return chunks.get(number);
}

function chunkOf(answer) { // the last chunk that starts at or before the answer
  let low = 0, high = data.chunkStarts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (data.chunkStarts[middle] <= answer) low = middle; else high = middle - 1;
  }
  return low;
}

async function textOf(answer) {
  const number = chunkOf(answer), content = await chunk(number);
  let at = answer - data.chunkStarts[number];
  const detail = content.texts[at][1];
  while (content.texts[at][0] === null) at -= 1; // the same text as the answer before it
  return [content.texts[at][0], detail];
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function visible(text) { // spell out control characters, so that none can hide or reorder text
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}]/gu, (char) => {
    if (char === "\n" || char === "\t") return char;
    const code = char.codePointAt(0);
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
}

function templateOf(answer) { // number of its prompt template; 0 is the question as it stands
  return data.template[answer] ?? 0;
}

function answersOf(problem) {
  const found = [], stop = data.starts[problem + 1] ?? data.mark.length;
  const template = state.show === "worded" ? ALL_TEMPLATES : state.template;
  for (let i = data.starts[problem]; i < stop; i++) {
    if (state.decoding && data.decoding[i] !== state.decoding) continue;
    if (template === ALL_TEMPLATES || templateOf(i) === template) found.push(i);
  }
  return found;
}

function isRight(answers, source) { // by majority of the judged answers; null if none was judged
  let right = 0, judged = 0;
  for (const i of answers) {
    if (data.source[i] !== source || "J-".includes(data.mark[i])) continue;
    judged += 1;
    right += data.mark[i] === "R";
  }
  return judged ? 2 * right >= judged : null;
}

function flip(answers) { // 1 fixed, -1 broken, 2 both, 0 neither; within each template
  const pairs = new Map(); // one verdict each: by answer for two judgements of one text and greedy answers
  for (const i of answers) {
    if (data.source[i] !== state.a && data.source[i] !== state.b) continue;
    const isOneEach = data.isOneText || data.decoding[i] === "g";
    const key = isOneEach ? slotOf(i) : `${templateOf(i)} s`;
    if (!pairs.has(key)) pairs.set(key, []);
    pairs.get(key).push(i);
  }
  let fixed = false, broken = false;
  for (const of of pairs.values()) {
    const before = isRight(of, state.a), after = isRight(of, state.b);
    if (before === null || after === null || before === after) continue;
    if (after) fixed = true; else broken = true;
  }
  return fixed && broken ? 2 : fixed ? 1 : broken ? -1 : 0;
}

function slotOf(answer) { // what answers of several sets share that stand side by side
  return `${templateOf(answer)} ${data.decoding[answer]}${data.sample[answer]}`;
}

function isWorded(answers) { // one set's samples are mostly right in one template, and not in another
  for (const source of data.sources.keys()) {
    const verdicts = new Set();
    for (const template of data.templates.keys()) {
      const sampled = answers.filter((i) => data.decoding[i] === "s" && templateOf(i) === template);
      verdicts.add(isRight(sampled, source));
    }
    if (verdicts.has(true) && verdicts.has(false)) return true;
  }
  return false;
}

function disagrees(answers) { // within one set, template and decoding
  const seen = new Map();
  for (const i of answers) {
    if ("J-".includes(data.mark[i])) continue;
    const key = `${data.source[i]} ${templateOf(i)} ${data.decoding[i]}`, right = data.mark[i] === "R";
    if (seen.has(key) && seen.get(key) !== right) return true;
    seen.set(key, right);
  }
  return false;
}

const MATCHES = {
  all: () => true,
  flipped: (answers) => flip(answers) !== 0,
  fixed: (answers) => [1, 2].includes(flip(answers)),
  broken: (answers) => [-1, 2].includes(flip(answers)),
  disagreed: disagrees,
  worded: isWorded,
  cut: (answers) => answers.some(ANSWER_MATCHES.cut),
  unparsed: (answers) => answers.some(ANSWER_MATCHES.unparsed),
  unjudged: (answers) => answers.some(ANSWER_MATCHES.unjudged),
  none: (answers) => answers.every((i) => data.mark[i] !== "R"),
  every: (answers) => answers.every((i) => data.mark[i] === "R"),
};
const ANSWER_MATCHES = { // answers that a filter is about; they are shown first
  cut: (i) => data.cut[i] === "1",
  unparsed: (i) => data.mark[i] === "N",
  unjudged: (i) => "J-".includes(data.mark[i]),
};

function problemsShown() {
  const wanted = state.search.toLowerCase(), found = [];
  for (let p = 0; p < data.ids.length; p++) {
    if (state.benchmark >= 0 && data.of[p] !== state.benchmark) continue;
    if (wanted && !data.ids[p].toLowerCase().startsWith(wanted) && !data.titles[p].toLowerCase().includes(wanted)) continue;
    const answers = answersOf(p);
    if (answers.length && MATCHES[state.show](answers)) found.push(p);
  }
  return found;
}

function strip(answers) {
  const made = element("span", { className: "strip" });
  for (const i of answers.slice(0, 64)) {
    made.append(element("i", { className: `${data.mark[i]}${data.cut[i] === "1" ? " cut" : ""}` }));
  }
  return made;
}

function drawList() {
  const found = problemsShown(), list = document.getElementById("list");
  const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
  state.page = Math.min(state.page, pages - 1);
  const items = element("ol");
  for (const p of found.slice(state.page * PAGE_SIZE, (state.page + 1) * PAGE_SIZE)) {
    const answers = answersOf(p);
    const whose = data.sources.map((source, s) => {
      const own = answers.filter((i) => data.source[i] === s);
      return own.length ? element("span", { className: "whose" }, strip(own), ` ${source.name}`) : "";
    });
    const what = element("span", { className: "what" }, visible(data.titles[p]) || data.ids[p]);
    const button = element("button", { className: "problem", type: "button", onclick: () => open(p) }, what, ...whose);
    button.setAttribute("aria-current", String(p === state.problem));
    button.dataset.problem = p;
    items.append(element("li", {}, button));
  }
  const turn = (by) => () => { state.page += by; drawList(); list.scrollTop = 0; };
  const pager = element("div", { className: "pager" },
    element("button", { type: "button", disabled: state.page === 0, onclick: turn(-1) }, "previous"),
    `${found.length.toLocaleString("en")} of ${data.ids.length.toLocaleString("en")} problems, page ${state.page + 1} of ${pages}`,
    element("button", { type: "button", disabled: state.page + 1 >= pages, onclick: turn(1) }, "next"));
  list.replaceChildren(pager, items);
  if (!found.includes(state.problem)) open(found.length ? found[0] : -1);
}

async function open(problem) {
  state.problem = problem;
  for (const button of document.querySelectorAll("button.problem")) {
    button.setAttribute("aria-current", String(Number(button.dataset.problem) === problem));
  }
  remember();
  const detail = document.getElementById("detail");
  if (problem < 0) { detail.replaceChildren(element("p", { className: "card" }, "No problem fits these filters.")); return; }
  try {
    const first = data.starts[problem], content = await chunk(chunkOf(first));
    if (state.problem !== problem) return; // another one was opened meanwhile
    const [question, expected] = content.problems[problem];
    const head = element("div", { className: "card" },
      element("div", { className: "mono soft" }, `${data.benchmarks[data.of[problem]]} / ${data.ids[problem]}`),
      element("pre", {}, visible(question) || "(the file has no question)"),
      element("p", { className: "why" }, "Reference: ", element("code", {}, visible(expected))),
      ...wordings(answersOf(problem)));
    detail.replaceChildren(head, ...(await answersView(problem)));
  } catch (error) { trouble(error); }
}

function wordings(answers) { // texts of the templates in which the shown answers were asked
  const texts = new Set();
  for (const i of answers) {
    const name = data.templates[templateOf(i)], text = data.sources[data.source[i]].templates[name];
    if (templateOf(i) && text) texts.add(`Template ${name}: ${text}`);
  }
  return [...texts].map((text) => element("p", { className: "why wording" }, visible(text)));
}

async function answersView(problem) {
  const groups = new Map(); // answers of several sets with the same template, decoding and number stand side by side
  for (const i of answersOf(problem)) {
    const key = slotOf(i);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  const about = ANSWER_MATCHES[state.show], all = [...groups.values()];
  const isAbout = (group) => (about ? group.some(about) : state.show === "flipped" && data.isOneText && flip(group) !== 0);
  all.sort((x, y) => isAbout(y) - isAbout(x));
  const body = element("div"), chips = element("div", { className: "chips" });
  const shown = new Set();
  const show = async (group, chip) => {
    if (shown.has(group)) return;
    shown.add(group);
    chip.setAttribute("aria-pressed", "true");
    body.append(await pairView(group));
  };
  const made = all.map((group) => {
    const mark = data.mark[group[group.length - 1]];
    const number = data.decoding[group[0]] === "g" ? "greedy" : `${data.sample[group[0]]}`;
    const template = templateOf(group[0]) ? `${data.templates[templateOf(group[0])]} ` : "";
    const chip = element("button", { className: `chip ${mark}`, type: "button" }, template + number);
    chip.title = group.map((i) => `${data.sources[data.source[i]].name}: ${WORDS[data.mark[i]]}`).join("; ");
    chip.onclick = () => show(group, chip).catch(trouble);
    chips.append(chip);
    return [group, chip];
  });
  for (const [group, chip] of made.slice(0, SHOWN_FIRST)) await show(group, chip);
  const parts = [element("h4", {}, `${all.length} answers each; choose one to show it`), chips, body];
  if (made.length > SHOWN_FIRST) {
    const more = element("button", { className: "more", type: "button" }, `show all ${made.length}`);
    more.onclick = async () => { more.remove(); for (const [group, chip] of made) await show(group, chip).catch(trouble); };
    parts.push(more);
  }
  return parts;
}

async function pairView(group) {
  const pair = element("article", { className: "pair" });
  pair.style.gridTemplateColumns = group.length < 4 ? `repeat(${group.length}, minmax(0, 1fr))` : "";
  const texts = await Promise.all(group.map(textOf));
  const isOne = group.length > 1 && texts.every(([text]) => text === texts[0][0]);
  const heads = group.map((i, n) => answerHead(i, texts[n][1]));
  group.forEach((i, n) => {
    const parts = isOne ? [] : [answerText(texts[n][0])];
    pair.append(element("div", { className: "answer" }, ...heads[n], ...parts));
  });
  if (isOne) { // two judgements of one text: it stands once, below both
    const below = element("div", { className: "answer" }, answerText(texts[0][0]));
    below.style.gridColumn = "1 / -1";
    pair.append(below);
  }
  return pair;
}

function answerHead(i, detail) {
  const name = data.decoding[i] === "g" ? "greedy" : `sample ${data.sample[i]}`;
  const facts = templateOf(i) ? [name, `template ${data.templates[templateOf(i)]}`] : [name];
  if (data.tokens[i] !== null) facts.push(`${data.tokens[i].toLocaleString("en")} tokens`);
  if (data.cut[i] === "1") facts.push("cut off");
  return [
    element("header", {},
      element("b", {}, data.sources[data.source[i]].name),
      element("span", { className: `mark ${data.mark[i]}` }, WORDS[data.mark[i]]),
      element("small", {}, facts.join(", "))),
    element("div", { className: "why" }, visible(detail)),
  ];
}

function answerText(text) {
  return element("div", { className: "text" }, element("pre", {}, visible(text) || "(empty)"));
}

function select(label, options, value, onchange) {
  const made = element("select");
  for (const [key, text] of options) made.append(element("option", { value: key, selected: String(key) === String(value) }, text));
  made.onchange = () => { onchange(made.value); state.page = 0; drawList(); if (state.problem >= 0) open(state.problem); };
  return element("label", {}, label, made);
}

function drawControls() {
  const several = data.sources.length > 1;
  const sources = data.sources.map((source, s) => [s, source.name]);
  const hasTemplates = data.templates.length > 1;
  const hidden = [...(several ? [] : ["flipped", "fixed", "broken"]), ...(hasTemplates ? [] : ["worded"])];
  const shows = Object.entries(SHOW).filter(([key]) => !hidden.includes(key));
  const parts = [select("show", shows, state.show, (value) => { state.show = value; })];
  if (data.benchmarks.length > 1) {
    const names = [[-1, "all"], ...data.benchmarks.map((name, b) => [b, name])];
    parts.push(select("benchmark", names, state.benchmark, (value) => { state.benchmark = Number(value); }));
  }
  if (hasTemplates) {
    const names = data.templates.map((name, t) => [t, t ? name : `${name}: the question as it stands`]);
    const change = (value) => { state.template = Number(value); };
    parts.push(select("prompt template", [...names, [ALL_TEMPLATES, "all"]], state.template, change));
  }
  if (data.decoding.includes("g") && data.decoding.includes("s")) {
    const decodings = [["", "all"], ["s", "sampled"], ["g", "greedy"]];
    parts.push(select("decoding", decodings, state.decoding, (value) => { state.decoding = value; }));
  }
  if (several) {
    parts.push(select("A", sources, state.a, (value) => { state.a = Number(value); }));
    parts.push(select("B", sources, state.b, (value) => { state.b = Number(value); }));
  }
  const search = element("input", { type: "search", placeholder: "words of the question, or an id", value: state.search });
  search.oninput = () => { state.search = search.value.trim(); state.page = 0; drawList(); };
  parts.push(element("label", {}, "search", search));
  document.getElementById("controls").replaceChildren(...parts);
}

function drawShares() {
  const head = ["benchmark", "answers of", "decoding", "problems", "answers", "score", "95 % interval", "cut off", "no answer", "not judged"];
  const table = element("table");
  table.append(element("thead", {}, element("tr", {}, ...head.map((name, n) => element("th", { className: n > 2 ? "num" : "" }, name)))));
  table.append(element("tbody", {}, ...data.shares.map((row) => element("tr", {},
    ...row.map((cell, n) => element(n ? "td" : "th", { className: n > 2 ? "num" : "" }, cell))))));
  document.getElementById("shares").replaceChildren(table);
  const key = [["R", "right"], ["W", "wrong"], ["N", "no answer"], ["J", "not judged"]];
  document.getElementById("key").replaceChildren(...key.map(([letter, word]) =>
    element("span", {}, element("i", { className: letter }), word)), "half a square: cut off", element("span", {}, COMPARED));
}

function remember() { // the address names what is shown, so that a link opens it
  const parts = new URLSearchParams();
  if (state.problem >= 0) parts.set("problem", `${data.benchmarks[data.of[state.problem]]}/${data.ids[state.problem]}`);
  if (state.show !== "all") parts.set("show", state.show);
  if (state.benchmark >= 0) parts.set("benchmark", data.benchmarks[state.benchmark]);
  if (state.template) parts.set("template", data.templates[state.template] ?? "*");
  if (state.decoding) parts.set("decoding", state.decoding);
  if (data.sources.length > 1) { parts.set("a", state.a); parts.set("b", state.b); }
  history.replaceState(null, "", `#${parts}`);
}

function recall() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const show = parts.get("show"), wanted = parts.get("problem") ?? "", last = data.sources.length - 1;
  if (Object.hasOwn(SHOW, show ?? "")) state.show = show;
  state.a = Math.min(Number(parts.get("a") ?? 0) || 0, last);
  state.b = Math.min(Number(parts.get("b") ?? last) || 0, last);
  state.benchmark = data.benchmarks.indexOf(parts.get("benchmark") ?? "");
  const template = parts.get("template") ?? data.templates[0];
  state.template = template === "*" ? ALL_TEMPLATES : Math.max(0, data.templates.indexOf(template));
  state.decoding = ["s", "g"].includes(parts.get("decoding")) ? parts.get("decoding") : "";
  state.problem = data.ids.findIndex((id, p) => `${data.benchmarks[data.of[p]]}/${id}` === wanted);
}

function trouble(error) {
  const shown = document.getElementById("trouble");
  shown.hidden = false;
  shown.textContent = `The data cannot be loaded (${error.message}). Keep the folder ${FOLDER} beside this page.`;
}

function start() {
  recall();
  drawShares();
  drawControls();
  const wanted = state.problem;
  if (wanted >= 0) state.page = Math.max(0, Math.floor(problemsShown().indexOf(wanted) / PAGE_SIZE));
  drawList();
  if (wanted >= 0) open(wanted);
}

window.addEventListener("hashchange", () => { if (data) start(); });
load("index.js", () => trouble(new Error("index.js is missing")));
