// Recent requests and failures, and what each caller has used: counts and names, no text.

import { byId, el, set, table, update } from "./dom.js";
import { percent, plural, seconds, whole } from "./format.js";

const WINDOW = 300; // seconds that the caption counts failures over
const LONGEST = 26; // characters of a name, before its middle is left out
let shown = null;

export function showRequests(requests) {
  shown = requests;
  const failures = requests.failures.filter(({ at }) => requests.now - at < WINDOW).length;
  const many = failures === requests.failures.length && requests.failed > failures ? "at least " : "";
  byId("requests-caption").textContent =
    `${plural(requests.count, "request")} since the start, ${failures ? many + whole(failures) : "none"} failed in the last 5 min`;
  byId("requests-caption").classList.toggle("bad", failures > 0);
  showList();
  showCallers(requests);
}

function showList() {
  const isFailures = byId("requests-failed").checked;
  const list = isFailures ? shown.failures : shown.last;
  const hasCallers = shown.callers.some(({ key, tenant }) => key || tenant);
  const heads = [
    ["ended", "lead"], ["request", "lead"], ["model"], ...(hasCallers ? [["by"]] : []), ["status", "lead"], ["prompt", "number"], ["cached", "number"],
    ["answer", "number"], ["first token", "number"], ["in all", "number"],
  ];
  const rows = list.map((each) => [
    `${seconds(Math.max(0, shown.now - each.at))} ago`,
    set(el("span", "", `${each.method} ${each.path}`), { title: each.request_id }),
    short(each.adapter ?? each.model ?? ""),
    ...(hasCallers ? [short(each.key ?? each.tenant ?? "")] : []),
    outcome(each),
    each.prompt_tokens === undefined ? "" : whole(each.prompt_tokens),
    each.cached_tokens === undefined ? "" : whole(each.cached_tokens),
    each.completion_tokens === undefined ? "" : whole(each.completion_tokens),
    each.first_token_seconds === undefined ? "" : seconds(each.first_token_seconds),
    seconds(each.seconds),
  ]);
  const none = isFailures ? "No request has failed." : "No request has ended yet.";
  update(byId("requests"), rows.length ? table(heads, rows) : el("p", "empty", none));
}

/** The status, with the code of the error or how the sequences ended. */
function outcome({ status, error, finished }) {
  const isBad = status >= 400 || status === 0 || error !== undefined;
  const ends = Object.entries(finished ?? {}).map(([end, count]) => (count === 1 ? end : `${count} ${end}`));
  return el("span", isBad ? "tag wrong" : "tag", [status || "left", error ?? ends.join(", ")].filter(Boolean).join(" "));
}

function showCallers({ now, callers }) {
  byId("callers-box").hidden = !callers.some(({ key, tenant }) => key || tenant);
  const heads = [
    ["caller", "lead"], ["tenant", "lead"], ["requests", "number"], ["failed", "number"], ["prompt", "number"], ["cached", "number"],
    ["answers", "number"], ["last"],
  ];
  const rows = callers.map((each) => [
    short(each.key || "without a key"),
    short(each.tenant),
    whole(each.requests),
    each.failed ? el("span", "bad", whole(each.failed)) : "0",
    whole(each.prompt_tokens),
    each.prompt_tokens ? percent(each.cached_tokens / each.prompt_tokens) : "–",
    whole(each.completion_tokens),
    `${seconds(Math.max(0, now - each.last))} ago`,
  ]);
  update(byId("callers"), table(heads, rows));
}

/** A name whose middle is left out where it is long, with the whole of it as its title. */
export function short(name) {
  if (name.length <= LONGEST) return name;
  const half = (LONGEST - 1) / 2;
  return set(el("span", "", `${name.slice(0, Math.ceil(half))}…${name.slice(-Math.floor(half))}`), { title: name });
}

byId("requests-failed").addEventListener("change", () => shown && showList());
