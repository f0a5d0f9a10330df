/** What a tab remembers until it is closed; where browsers forbid that, until the page is left. */

/** Keeps a text; an empty one is forgotten. @param {string} name @param {string} text */
export function keep(name, text) {
  try {
    if (text) sessionStorage.setItem(name, text);
    else sessionStorage.removeItem(name);
  } catch {
    // Storage is full or forbidden; nothing here depends on it.
  }
}

/** @param {string} name @returns {string} */
export function recall(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}
