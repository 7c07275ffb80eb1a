// Load, unload and promote adapters, by the server's own routes; what it answers stands below the table.

import { byId, el, say, set } from "./dom.js";
import { send } from "./server.js";

/** The button of an adapter's row: a version of the catalogue can be promoted, any other adapter unloaded. */
export function actionOf(name) {
  const isVersion = name.includes("@");
  const button = el("button", "quiet small", isVersion ? "promote" : "unload");
  return set(button, { type: "button", "data-action": isVersion ? "promote" : "unload", "data-name": name });
}

async function act(words, path, body) {
  byId("adapters-said").classList.remove("bad");
  say(byId("adapters-said"), `${words} …`);
  try {
    await send(path, body);
    say(byId("adapters-said"), `${words}: done`);
    return true;
  } catch (error) {
    byId("adapters-said").classList.add("bad");
    say(byId("adapters-said"), error.message);
    return false;
  }
}

// The table's elements are made anew and have no listeners of their own.
byId("adapters").addEventListener("click", ({ target }) => {
  const { action, name } = target.dataset ?? {};
  if (action === "unload" && confirm(`Unload ${name}? Its running requests end first; new ones are refused.`)) {
    act(`unload ${name}`, "v1/unload_lora_adapter", { lora_name: name });
  }
  if (action === "promote" && confirm(`Let ${name} get all new requests of its name?`)) {
    const [model, version] = name.split("@");
    act(`promote ${name}`, `v1/admin/models/${encodeURIComponent(model)}/promote`, { version });
  }
});
byId("adapter-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = byId("adapter-name").value.trim();
  const done = await act(`load ${name}`, "v1/load_lora_adapter", { lora_name: name, lora_path: byId("adapter-path").value.trim() });
  if (done) event.target.reset();
});
