// SPDX-License-Identifier: Apache-2.0
// Light or dark: as the system says, or as chosen on this page. A classic script, which runs before the first
// paint, so that a page kept dark does not appear white first.

{
  const KEY = "theme";
  const CHOICES = ["system", "light", "dark"];
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const announce = () => dispatchEvent(new Event("themechange"));

  const kept = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // the browser stores nothing for this page
    }
  };
  const apply = (choice) => {
    root.dataset.theme = CHOICES.includes(choice) ? choice : "system";
  };

  window.theme = {
    choice: () => root.dataset.theme,
    next: () => {
      const choice = CHOICES[(CHOICES.indexOf(root.dataset.theme) + 1) % CHOICES.length];
      apply(choice);
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // It lasts until the page is closed.
      }
      announce();
    },
  };
  apply(kept());
  system.addEventListener("change", announce);
}
