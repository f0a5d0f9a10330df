/** Before Swagger UI: the page's policy allows no way to write markup from strings, which the bundle
 * would ask for as soon as it is loaded. What would use it is replaced in main.js. */

Object.defineProperty(window, "trustedTypes", { value: undefined });
